"""What releases cost: events, their composition, and noise for a given epsilon."""
