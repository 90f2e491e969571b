"""The speedrun: the least rows or CPU seconds until hard recall is solved, and who holds it."""
