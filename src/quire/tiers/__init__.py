"""Tiers: transfers of pages between device, host, stores and peers, and the comparison with computing them."""
