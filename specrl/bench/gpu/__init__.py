"""`specrl bench gpu`: everything that a first GPU is asked, section by section and without a network."""
