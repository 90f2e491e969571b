"""Self-contained HTML pages: a run's report, a comparison, a certificate."""
