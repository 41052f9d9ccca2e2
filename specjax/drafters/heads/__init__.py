"""The drafters of draft heads: `head_drafter` for all kinds, and PPD, which drafts differently."""
