"""What all launchers share."""
