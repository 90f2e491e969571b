"""What `lab.train`, `lab.open`, `lab.analyze` and `lab.sweep` do, and the commands as well."""
