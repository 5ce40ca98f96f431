"""Programs that make the tiny model that ships with the project; ``python -m tools.tiny.train`` runs them in order."""
