"""How figures look, and those that an analysis shares or keeps apart for their length."""
