"""Below the device: transfers of pages between device, host, stores and peers, and what they are worth."""
