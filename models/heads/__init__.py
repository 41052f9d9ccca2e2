"""Draft heads: small networks that draft from the target's own activations.

`contract` defines the interface of a head and the alignment of features and tokens. Every method has one file with its
mathematics and its row of the catalogue; `kinds` collects them. Their drafter is `specjax.drafters.head_drafter`.
"""
