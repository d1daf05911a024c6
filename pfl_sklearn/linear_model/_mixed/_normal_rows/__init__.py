"""Short cuts of normal rows: a reduction, closed forms, and priors that are not normal."""
