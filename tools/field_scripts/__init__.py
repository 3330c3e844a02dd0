"""Public training scripts of other projects, each as a plain loop and as a port to trainstack, and their comparison."""
