"""Start the processes of a training from a script or a notebook."""
