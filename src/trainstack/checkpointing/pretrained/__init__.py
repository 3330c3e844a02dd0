"""Folders as `save_pretrained` of Hugging Face libraries writes them: reading, and writing of exports."""
