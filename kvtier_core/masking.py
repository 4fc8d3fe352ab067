"""What counts as a secret, and how text is cleaned of it before it can reach a message, a repr or a log.

Secrets are: a secret type's value (``SecretStr``), a value whose name says so, every value of ``storage_options``, the
user part of a URL, and URL parameters whose name says so. This module never raises, and works on duck types, so that
importing it costs nothing.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import unquote

MASK = "**********"

_SECRET_NAME = re.compile(
    r"(?:^|[^a-z])"
    r"(?:pass|passwd|password|passphrase|secret|token|credentials?|signature|sig|sas|"
    r"(?:api|access|account|private|secret)[_-]?key)"
    r"(?:$|[^a-z])"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# Up to the last "@", slashes included: keys pasted into a URL unescaped (AWS secrets hold slashes) are hidden too.
_URL_USER = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)(?P<user>\S*)@")
_URL_PARAMETER = re.compile(r"(?P<name>[?&;][\w.-]+)=(?P<value>[^&;#\s\"']+)")
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/?#\s]*@)?[^/?#@\s]+/?")
"""A server, and nothing of what may be secret behind it."""
_SHORT = 4
"""A shorter secret is masked only where it stands alone: it would turn every other word into a mask."""


def is_secret_name(name: str) -> bool:
    """Whether a setting called *name* (``api_key``, ``AccessKeyId``) holds a secret, whatever its type says."""
    return _SECRET_NAME.search(_CAMEL.sub("_", name).lower()) is not None


def holds_only_secrets(name: str) -> bool:
    """Whether every value inside the table called *name* is treated as a secret."""
    return name.lower() == "storage_options" or is_secret_name(name)


def mask_text(text: str, secrets: Iterable[str] = ()) -> str:
    """*text* without the given secrets, without URL users and without secret URL parameters."""
    for secret in sorted({item for item in secrets if item}, key=len, reverse=True):
        if len(secret) >= _SHORT:
            text = text.replace(secret, MASK)
        else:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", MASK, text)
    text = _URL_USER.sub(rf"\g<scheme>{MASK}@", text)
    return _URL_PARAMETER.sub(_mask_parameter, text)


def _mask_parameter(match: re.Match[str]) -> str:
    return f"{match['name']}={MASK}" if is_secret_name(match["name"]) else match[0]


def secrets_in_text(text: str) -> set[str]:
    """The secret parts of a string that is not itself a secret: URL users, their passwords, URL parameters."""
    found: set[str] = set()
    for match in _URL_USER.finditer(text):
        user, _, password = match["user"].partition(":")
        written = {match["user"], password or user}
        found |= written | set(map(unquote, written))  # clients and servers show what it stands for
    found |= {match["value"] for match in _URL_PARAMETER.finditer(text) if is_secret_name(match["name"])}
    return found - {""}


def secrets_in_options(options: object) -> set[str]:
    """Every string of a table of connection options that must not be shown: all values, but for addresses of servers.

    Of ``{"endpoint_url": "http://me:pw@storage:9000", "key": "AKIA"}`` these are ``me:pw``, ``pw`` and ``AKIA``: a
    message about a server that is down is of no use without host and port.
    """
    if isinstance(options, Mapping):
        found: set[str] = set()
        for name, value in options.items():
            is_address = (
                isinstance(value, str) and _ADDRESS.fullmatch(value) and not is_secret_name(str(name))
            )
            found |= secrets_in_text(str(value)) if is_address else secrets_in_options(value)
        return found
    if isinstance(options, list | tuple | set | frozenset):
        return set().union(*map(secrets_in_options, options))
    return set(leaves(options)) - {""}


def leaves(value: object) -> Iterator[str]:
    """The texts and numbers in *value*, as text; what a secret type hides is shown."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from leaves(item)
    elif hasattr(value, "get_secret_value"):  # pydantic's, whose own text is a row of stars
        yield from leaves(value.get_secret_value())
    elif isinstance(value, bytes):
        yield value.decode(errors="replace")
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def mask_value(name: str, value: object) -> object:
    """*value* of the setting *name* as it may be shown: secrets replaced, settings tables as dictionaries."""
    if value is None or value == "" or isinstance(value, bool | int | float):
        return value
    if hasattr(value, "get_secret_value") or is_secret_name(name):
        return MASK
    fields = getattr(type(value), "model_fields", None)
    if fields is not None:  # a settings table inside another
        value = {field: getattr(value, field) for field in fields}
    if isinstance(value, Mapping):
        hide = holds_only_secrets(name)
        return {key: MASK if hide else mask_value(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [mask_value(name, item) for item in value]
    text = str(value)
    masked = mask_text(text)
    return value if masked == text else masked
