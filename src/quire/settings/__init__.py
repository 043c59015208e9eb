"""How a setting is declared, and settings that several parts have in common."""
