"""Claims about models: what would hold or refute them, and what a sweep's table says of them."""
