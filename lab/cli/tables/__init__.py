"""What commands show in a terminal: a module for each thing shown."""
