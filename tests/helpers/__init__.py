"""What several tests share: tables, oracles, references. No test imports another test."""
