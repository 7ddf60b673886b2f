"""The one choose loop, and the table in force."""
