"""Records: the least rows or CPU seconds until hard recall is solved, and who holds each."""
