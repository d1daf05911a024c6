"""Tables of clients' estimates that may be published, because the noise protects their rows."""
