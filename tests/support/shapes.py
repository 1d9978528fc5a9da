"""How annotations are checked while tests run: by beartype, with an int where a float is asked for (PEP 484's numeric tower)."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
