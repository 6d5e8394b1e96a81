"""What a step reads: policies, scopes, head modes."""

POLICIES = ("topk", "share", "mass", "threshold")
SCOPES = ("kv-head", "union")
# what one kv head does: selects groups, reads them all, or reads the guards alone
HEAD_MODES = ("gate", "dense", "window")
