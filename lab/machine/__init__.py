"""This machine: devices, memory, processor, and measurements of them that are kept."""
