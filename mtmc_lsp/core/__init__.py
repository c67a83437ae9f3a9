"""The words of the project (DESIGN section 2) as small frozen values. Imports nothing of ours but itself, and no torch."""
