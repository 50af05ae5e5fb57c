"""Any classifier as early blocks → late blocks → feature → linear head, with forward-mode tangents."""
