"""Makes `composing` importable from every test folder."""
