"""Transfer of pages between engines: a prefill engine computes a prompt, a decode engine receives its pages."""
