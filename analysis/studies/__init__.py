"""What studies found: tables of many runs, put into words and figures."""
