"""A user's module that ends the program that imports it."""

raise SystemExit("has had enough")
