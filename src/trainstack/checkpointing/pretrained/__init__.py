"""Folders in the form of `save_pretrained` of Hugging Face libraries: reading, and writing of exports."""
