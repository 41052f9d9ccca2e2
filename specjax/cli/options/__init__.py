"""Options of the commands, and checks of their values."""
