"""Learned drafters as modules: heads that read the target's own states.

`contract` says what each is to the drafters, `pairs` how features, tokens and positions are aligned; one file a family.
"""
