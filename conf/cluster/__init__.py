"""The machines that the ranks run on."""
