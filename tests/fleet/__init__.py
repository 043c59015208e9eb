"""Fleets on a real Ray of this machine."""
