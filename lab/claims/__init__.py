"""Claims of the paper and of others, each as a file that `lab claim` reads."""
