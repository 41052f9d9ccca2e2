"""The runs of `specjax bench`: methods, their baselines, and the report."""
