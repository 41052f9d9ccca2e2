"""Options that several commands share, and the validation of their values."""
