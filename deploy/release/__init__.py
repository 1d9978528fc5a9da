"""Release: the ledger, the gate, promotion and rollback."""
