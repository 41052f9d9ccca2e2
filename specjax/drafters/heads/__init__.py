"""The drafter of draft heads. `head_drafter` builds it for every kind; PPD drafts differently and has a file of its own."""
