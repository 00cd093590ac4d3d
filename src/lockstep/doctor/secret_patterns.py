"""How secrets are known: the one table of names and shapes that the bundle, `lockstep env` and all reports use.

A *shape* is what a service's keys look like wherever they stand. A *name* makes what it holds a secret: some names
always, others (`key`, `tokens`, which training code uses for other things too) only together with a value that looks
drawn at random. No pattern looks further than a value reaches, so a text of any length takes time in proportion to it.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

HIDDEN = "(hidden)"
"""Stands for what was taken out."""


class Secrecy(IntEnum):
    """What a name says about its value."""

    NONE = 0
    RANDOM = 1
    """A secret if it looks drawn at random: `key`, `tokens`."""
    LIKELY = 2
    """A secret unless it is an ordinary word: `token`, `auth`."""
    ALWAYS = 3
    """A secret, whatever it looks like: `password`, `HF_TOKEN`."""


# ---------------------------------------------------------------- names

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = frozenset(
    (
        *("password", "passwords", "passwd", "passwds", "passphrase", "passphrases", "passcode", "pwd", "pw"),
        *("secret", "secrets", "credential", "credentials", "creds", "cred", "authorization", "cookie"),
        *("cookies", "bearer", "jwt", "dsn", "webhook", "apikey", "apikeys", "authtoken"),
    )
)
_PASSWORDS = frozenset(["password", "passwd", "passphrase", "passcode", "pwd", "pw", "pass"])
"""Of these a number is a secret too."""
_ENDINGS = (
    *("password", "passwd", "passphrase", "secret", "apikey", "accesskey", "privatekey", "secretkey", "credentials"),
    "authtoken",
)
"""Ends of words that do the same: PGPASSWORD, authtoken."""
_OWNERS = frozenset(
    (
        *("api", "access", "account", "admin", "aes", "app", "auth", "bot", "client", "comet", "csrf", "db"),
        *("deploy", "email", "encryption", "ftp", "git", "github", "gitlab", "gpg", "hf", "hmac", "hub"),
        *("huggingface", "jwt", "license", "login", "mail", "master", "my", "mysql", "oauth", "openai"),
        *("personal", "pg", "postgres", "private", "proxy", "redis", "refresh", "root", "rsa", "secret"),
        *("service", "session", "shared", "signing", "slack", "smtp", "ssh", "ssl", "storage", "subscription"),
        *("sudo", "tls", "user", "vault", "wandb"),
    )
)
"""Words before `key`, `token`, `pass` and `pat` that make it a secret; after others (`sort_key`) it often is none."""
_KINDS = frozenset(["key", "keys", "token", "tokens", "pass", "pat", "auth"])
_TAILS = frozenset(
    (
        *("base", "current", "data", "default", "dev", "hash", "hex", "id", "main", "new", "old", "prod"),
        *("raw", "staging", "str", "string", "test", "text", "url", "value"),
    )
)
"""Words that may stand after it: `client_key_data`, `API_TOKEN_PROD`."""
_HARMLESS = re.compile(
    r"^(?:OLD)?PWD$|AUTH_SOCK|(?i:TOKENIZERS?|(?:PAD|BOS|EOS|UNK|SEP|CLS|MASK|IMAGE|NUM|MAX|NEXT)_TOKEN"
    r"|TOKEN_(?:ID|TYPE)|PUBLIC_?KEY|(?:SORT|PRIMARY|FOREIGN|CACHE|GROUP_BY)_?KEY|KEY_?(?:PADDING|FRAME|VALUE)"
    r"|(?:Error|Exception)$)"
)


@lru_cache(maxsize=4096)
def secrecy(name: str) -> Secrecy:
    """What a variable, an option or a key of this name says about its value: HF_TOKEN, --api-key, db.password."""
    name = name.strip("-:")
    if _HARMLESS.search(name):
        return Secrecy.NONE
    *above, last = [part for part in name.split(".") if part] or [""]
    if any(part.lower() in ("secrets", "credentials", "passwords") for part in above):
        return Secrecy.ALWAYS
    words = [word.lower() for word in _WORD.findall(last)]
    if last.isupper() and len(words) > 1:
        # A variable: there the word may stand anywhere.
        telling = any(word in _SECRET or word in _KINDS - {"keys", "tokens"} for word in words)
        if telling or any(word.endswith((*_ENDINGS, "token")) for word in words):
            return Secrecy.ALWAYS
    while len(words) > 1 and words[-1] in _TAILS:
        words.pop()
    return _of_last(words)


def _of_last(words: list[str]) -> Secrecy:
    if not words:
        return Secrecy.NONE
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _SECRET or last.endswith(_ENDINGS):
        return Secrecy.ALWAYS
    if last in _KINDS and before in _OWNERS:
        return Secrecy.ALWAYS
    if last in ("token", "auth") or last.endswith("token") or (last == "pass" and not before):
        return Secrecy.LIKELY
    return Secrecy.RANDOM if last in ("key", "keys", "tokens", "pass") else Secrecy.NONE


def names_a_secret(name: str) -> bool:
    """Whether what goes by this name is a secret as a rule."""
    return secrecy(name) >= Secrecy.LIKELY


# ---------------------------------------------------------------- values

PLAIN = re.compile(
    r"^(?:None|null|nil|true|false|yes|no|on|off|\d{1,9}(?:\.\d+)?(?:e[+-]?\d+)?|\(hidden\)|)$", re.IGNORECASE
)
"""What is no secret, whatever its name: nothing, a number."""
_PLACEHOLDER = re.compile(
    r"(?:(?i:required|optional|missing|invalid|expired|unset|empty)|\*{3,}|\.{3,}|<[^<>]*>|\[[A-Z]+\]|\$\{?[A-Z_]+\}?)"
)
_NUMBER = re.compile(r"\d{4,9}")
_CODE = re.compile(
    r"[A-Za-z_][\w.]{0,80}\(|(?:os|self|args|cfg|config|opts|settings|torch|tokenizer|getpass)\.|[A-Za-z_]\w{0,40}\["
    r"|(?:str|bytes|bool|int|float|dict|list|tuple|type|Any|Optional|Union|SecretStr)$"
)
"""Source text, which a traceback shows: a call, an attribute, a type."""
_ORDINARY = re.compile(r"[A-Za-z]{1,11}|[A-Za-z]+(?:[._-][A-Za-z]+)+|.*[^\x21-\x7e].*|##.*")
_RANDOM = re.compile(r"[A-Za-z0-9+/=_-]{16,}")
_PIECE = re.compile(r"[A-Za-z0-9]{10,}")
_CHANGE = re.compile(r"(?<=[0-9])(?=[A-Za-z])|(?<=[A-Za-z])(?=[0-9])")


def is_random(value: str) -> bool:
    """Whether a text looks drawn at random: long, without words, letters and digits mixed."""
    return _RANDOM.fullmatch(value) is not None and any(
        sum(1 for _ in _CHANGE.finditer(piece[:80])) >= 3 for piece in _PIECE.findall(value)
    )


def is_secret(name: str, value: str, *, quoted: bool = True) -> bool:
    """Whether the value of this name in a text is a secret; one without quotes may be source text."""
    level = secrecy(name)
    if level == Secrecy.NONE:
        return False
    if PLAIN.match(value):
        words = _WORD.findall(name)
        return bool(words) and words[-1].lower() in _PASSWORDS and _NUMBER.fullmatch(value) is not None
    if _PLACEHOLDER.fullmatch(value):
        return False
    variable = name.isupper()
    if not quoted and not variable and (_CODE.match(value) or value == name or value.endswith(f".{name}")):
        return False
    if level == Secrecy.RANDOM:
        return is_random(value)
    if name.lower() == "pwd" and value.startswith(("/", "~")):
        return False
    return level == Secrecy.ALWAYS or not _ORDINARY.fullmatch(value)


# ---------------------------------------------------------------- shapes

_SHAPES = (
    r"hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}",  # Hugging Face
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}",
    r"gl(?:pat|rt|dt|cbt|ptt|ft|imt|agent|oas|soat)-[A-Za-z0-9_.-]{16,}",  # GitLab
    r"(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{16,}|whsec_[A-Za-z0-9+/=]{24,}",  # Stripe
    r"(?:A3T[A-Z0-9]|AKIA|ASIA|AGPA|AIDA|AROA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])",  # Amazon
    r"AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,}|1//0[A-Za-z0-9_-]{30,}",  # Google
    r"xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-\d-[A-Za-z0-9-]{20,}",  # Slack
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",  # SendGrid
    r"key-[0-9a-f]{32}|[0-9a-f]{32}-us\d{1,2}|xkeysib-[A-Za-z0-9-]{32,}",  # Mailgun, Mailchimp, Brevo
    r"SK[0-9a-f]{32}(?![A-Za-z0-9])",  # Twilio
    r"dapi[0-9a-f]{32}(?:-\d)?|hv[sbr]\.[A-Za-z0-9_-]{20,}",  # Databricks, Vault
    r"s\.(?=[A-Za-z]{0,23}[0-9])[A-Za-z0-9]{24}(?![A-Za-z0-9_.])",  # Vault before 1.10
    r"nvapi-[A-Za-z0-9_-]{20,}|r8_[A-Za-z0-9]{30,}|gsk_[A-Za-z0-9]{30,}|pplx-[A-Za-z0-9]{30,}|xai-[A-Za-z0-9]{30,}",
    r"pcsk_[A-Za-z0-9_]{30,}|lsv2_[a-z]{2}_[A-Za-z0-9_]{20,}|wandb_v\d_[A-Za-z0-9_]{20,}|tgp_v1_[A-Za-z0-9_-]{20,}",
    r"npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}|rubygems_[0-9a-f]{40,}|dckr_[a-z]{3}_[A-Za-z0-9_-]{16,}",
    r"do[opr]_v1_[0-9a-f]{40,}|gls[a-z]_[A-Za-z0-9_]{30,}|glc_[A-Za-z0-9+/=]{30,}",  # DigitalOcean, Grafana
    r"lin_api_[A-Za-z0-9]{30,}|ntn_[A-Za-z0-9]{30,}|figd_[A-Za-z0-9_-]{30,}|PMAK-[A-Za-z0-9-]{30,}",
    r"shp(?:at|ss|pa|ca)_[0-9a-f]{30,}|AT(?:ATT|CTT|BB)[A-Za-z0-9_=-]{20,}|sntry[su]_[A-Za-z0-9+/=_-]{30,}",
    r"tskey-[a-z]+-[A-Za-z0-9-]{16,}|AGE-SECRET-KEY-1[A-Z0-9]{20,}|sb[p]_[0-9a-f]{40}|rpa_[A-Za-z0-9]{30,}",
    r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{20,}",  # Terraform
    r"eyJ[A-Za-z0-9_+/-]{16,}(?:\.[A-Za-z0-9_-]+){0,4}={0,2}",  # a JSON web token, or JSON in base 64
)
_ALONE = (
    r"(?:sk|pk|rk)-(?=[A-Za-z_-]{0,200}[0-9])[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic and others; not sk-learn
    r"[A-Za-z0-9_.-]{3}\dQ~[A-Za-z0-9_.~-]{30,}",  # Azure's applications
    r"[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}",  # Discord
)
_IN_PLACE = (
    r"(?<=hooks\.slack\.com/)[^\s\"'<>]+|(?<=/webhooks/)[^\s\"'<>]{16,}|(?<=\.webhook\.office\.com/)[^\s\"'<>]+",
    r"(?<=[?&;])(?i:sig|X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token|X-Goog-Signature|AccessKeyId|token"
    r"|access_token)=[^\s&\"'<>]+",
    r"(?i:AccountKey|SharedAccessKey|SharedAccessSignature)=[^\s;\"']+",  # Azure
    r"\$(?:2[abxy]|5|6|y|apr1|argon2id?)\$[^\s:\"']{16,}",  # hashes of passwords
)
SHAPE = re.compile(
    rf"(?<![A-Za-z0-9])(?:{'|'.join(_SHAPES)})|(?<![A-Za-z0-9_.-])(?:{'|'.join(_ALONE)})|(?<!\d)\d{{8,10}}:AA[\w-]{{33}}"
)
"""What is a secret by itself; it lies within a `RUN`, which is found much faster. The last one is Telegram's."""
RUN = re.compile(r"[A-Za-z0-9_+/=.~:-]{16,}")
IN_PLACE = re.compile("|".join(_IN_PLACE))
"""What is a secret by what stands before it."""

_KEY_KIND = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?"
KEY_BLOCK = re.compile(
    rf"-----BEGIN {_KEY_KIND}-----.*?(?:-----END {_KEY_KIND}-----|\Z)"
    r"|(?<=Private-Lines: )\d{1,4}\s+[A-Za-z0-9+/=\s]+",
    re.DOTALL,
)
"""A private key, whole or without its end."""
KEY_END = re.compile(rf"-----END {_KEY_KIND}-----")
KEY_LINE = re.compile(r"[A-Za-z0-9+/=]{1,120}\s*")
IN_URL = re.compile(r"(?<=://)[^/\s\"'@]*:[^/\s\"']*(?=@)|(?<=://)[^/\s\"'@]+(?=@)")
"""A user's part of an address."""

_HEADERS = r"Authorization|Proxy-Authorization|X-Api-Key|Cookie|Set-Cookie"
IN_CONTEXT = (
    re.compile(rf"((?:{_HEADERS})[ \t]*:[ \t]*(?=(?:Digest|OAuth|AWS4|Signature)\b))[^\r\n]+", re.I),
    re.compile(rf"((?:{_HEADERS})[\"']?[ \t]*[:=][ \t]*(?:b(?=[\"']))?[\"']?)[^\s\"'][^\r\n\"']*", re.I),
    re.compile(r"(\b(?:Bearer|Basic)[ ])[A-Za-z0-9+/=._~-]{8,}"),
    re.compile(r"(\blogin\s{1,9}\S{1,200}\s{1,9}(?:account\s{1,9}\S{1,200}\s{1,9})?password\s{1,9})\S+"),  # .netrc
    re.compile(r"^([\w.*-]{1,200}:(?:\d{4,5}|\*):[\w.*-]{1,100}:[\w.*-]{1,100}:)\S+$", re.M),  # .pgpass
    re.compile(r"(\b(?:identified\s{1,9}by|password)\s{1,9})'[^'\n]{1,200}'", re.I),  # SQL
    re.compile(r"(\b(?:password|passphrase)\s{1,9}(?:is|was)\s{1,9})(?=\S{0,80}\d)[^\s\"']{8,200}", re.I),
    re.compile(r"(Auth\(\s{0,9}[\"'][^\"'\n]{0,200}[\"']\s{0,9},\s{0,9})(?:\"[^\"\n]{1,200}\"|'[^'\n]{1,200}')"),
    re.compile(r"(\b(?:api|access|using|wandb)\s{1,9}key:?\s{1,9})[0-9a-f]{40}\b", re.I),  # Weights & Biases
)
"""The first group stays, what follows is a secret."""

COMMANDS = (
    (re.compile(r"\b(?:mysql\w{0,9}|mariadb\w{0,9})\s"), re.compile(r"(\s-p)([^\s-]\S*)")),
    (re.compile(r"\b(?:(?:docker|podman|az)\s+login|sshpass|twine)\s"), re.compile(r"(\s-p\s*)(\S+)")),
    (re.compile(r"\bredis-cli\s"), re.compile(r"(\s-a\s+)(\S+)")),
    (re.compile(r"\bcurl\s"), re.compile(r"(\s(?:-u|--user)[\s=]*[^\s:]{1,200}:)([^\s\"']+)")),
    (re.compile(r"\bldap\w{1,9}\s"), re.compile(r"(\s-w\s+)(\S+)")),
    (re.compile(r"\bopenssl\s"), re.compile(r"(\bpass:)(\S+)")),
    (re.compile(r"\b(?:vault|wandb|huggingface-cli|hf auth)\s+login\s"), re.compile(r"(\s)((?!-)[\w.-]{20,})")),
)
"""A command, and where in the rest of its line a secret stands."""
