"""Linear mixed models of rows that belong to several groupings, crossed or nested."""
