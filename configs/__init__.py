"""Ready-made configurations, plain Python."""
