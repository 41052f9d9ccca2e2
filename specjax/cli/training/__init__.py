"""`specjax train`: its option groups, the checks of its flags, and its runs."""
