PORTS = dict(
    web=80,
    db=5432,
)


def load(key):
    return PORTS[key]
