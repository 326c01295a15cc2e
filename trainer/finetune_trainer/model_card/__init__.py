"""The model card of a result: README.md in the format of the Hugging Face Hub."""
