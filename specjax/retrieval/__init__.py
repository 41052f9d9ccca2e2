"""What was written before: n-grams and suffixes of the text itself, and datastores of corpora."""
