"""The composable configuration: a group of options in each folder, one file an option."""
