"""Secrets as they stand in logs, configuration files and command lines, and lines of training logs that hold none.

Every value is made up when the module is loaded, from the shape that its service documents: nothing here is a key of
anybody's, and no scanner takes this file for a leak.
"""

from __future__ import annotations

import base64
import json
import random
import string

_DRAW = random.Random(20250314)
_HEX = "0123456789abcdef"
_WORD = string.ascii_letters + string.digits
_URL = _WORD + "_-"
_B64 = _WORD + "+/"


def _made(count: int, letters: str = _WORD) -> str:
    """So many characters, of all kinds that there are, as in a key that a service has drawn."""
    both = any(map(str.isdigit, letters)) and any(map(str.isalpha, letters)) and count >= 5
    while True:
        drawn = "".join(_DRAW.choice(letters) for _ in range(count))
        if not both or (any(map(str.isdigit, drawn)) and any(map(str.isalpha, drawn)) and drawn[-1].isalnum()):
            return drawn


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


SECRETS: list[tuple[str, tuple[str, ...]]] = []
"""A text, and what must not be left of it."""


def _add(text: str, *secrets: str) -> None:
    """``text`` with each ``{}`` in place of one of the secrets."""
    for secret in secrets:
        text = text.replace("{}", secret, 1)
    assert "{}" not in text
    SECRETS.append((text, secrets))


def _shape(lead: str, count: int, letters: str = _WORD, tail: str = "") -> str:
    return lead + _made(count, letters) + tail


# ---------------------------------------------------------------- shapes, without a name beside them
for _text, _secret in (
    ("login with {} failed", _shape("hf" + "_", 34)),
    ("OSError: 401 Client Error for {}", _shape("api" + "_org_", 34)),
    ("remote: invalid {}", _shape("ghp" + "_", 36)),
    ("cloned by {} in 3 s", _shape("gho" + "_", 36)),
    ("using {}", _shape("github" + "_pat_", 82)),
    ("push with {}", _shape("glpat" + "-", 20, _URL)),
    ("runner {} registered", _shape("glrt" + "-", 20, _URL)),
    ("openai: Incorrect one provided: {}.", _shape("sk" + "-", 48)),
    ("project {}", _shape("sk" + "-proj-", 48)),
    ("anthropic {} is not valid", _shape("sk" + "-ant-api03-", 90, _URL)),
    ("router {}", _shape("sk" + "-or-v1-", 64, _HEX)),
    ("aws id {} not found", _shape("AKI" + "A", 16, string.ascii_uppercase + "234567")),
    ("assumed {}", _shape("ASI" + "A", 16, string.ascii_uppercase + "234567")),
    ("gcp {} rejected", _shape("AIz" + "aSy", 33, _URL)),
    ("oauth {}", _shape("ya29" + ".", 60, _URL)),
    ("google client {}", _shape("GOCSPX" + "-", 28, _URL)),
    ("azure app {}", _made(3) + "8Q" + "~" + _made(34)),
    ("stripe {}", _shape("sk" + "_live_", 24)),
    ("stripe {}", _shape("rk" + "_test_", 24)),
    ("stripe hook {}", _shape("whsec" + "_", 32)),
    ("slack {} revoked", _shape("xoxb" + "-", 12, string.digits) + "-" + _made(12, string.digits) + "-" + _made(24)),
    ("slack app {}", _shape("xapp" + "-1-A", 10, string.ascii_uppercase + "0123") + "-" + _made(64, _HEX)),
    (
        "posted to https://hooks.slack.com/services/{}",
        "T0" + _made(8).upper() + "/B0" + _made(8).upper() + "/" + _made(24),
    ),
    ("posted to https://discord.com/api/webhooks/112233445566778899/{}", _made(68, _URL)),
    ("alert to https://contoso.webhook.office.com/webhookb2/{}", _made(36, _HEX) + "@" + _made(36, _HEX)),
    ("discord bot {}", "MT" + _made(24) + "." + _made(6, _URL) + "." + _made(38, _URL)),
    ("https://api.telegram.org/bot{}/sendMessage", _made(10, "123456789") + ":AA" + _made(33, _URL)),
    ("telegram {}", _made(9, "123456789") + ":AA" + _made(33, _URL)),
    ("sendgrid {}", "SG" + "." + _made(22, _URL) + "." + _made(43, _URL)),
    ("mailgun {}", _shape("key" + "-", 32, _HEX)),
    ("mailchimp {}", _made(32, _HEX) + "-us" + "14"),
    ("brevo {}", _shape("xkeysib" + "-", 64, _HEX) + "-" + _made(16)),
    ("twilio {}", _shape("S" + "K", 32, _HEX)),
    ("databricks {}", _shape("dap" + "i", 32, _HEX)),
    ("vault {}", _shape("hvs" + ".", 24)),
    ("vault batch {}", _shape("hvb" + ".", 120, _URL)),
    ("vault, old: {}", _shape("s" + ".", 24)),
    ("nim {}", _shape("nvapi" + "-", 64, _URL)),
    ("replicate {}", _shape("r8" + "_", 37)),
    ("groq {}", _shape("gsk" + "_", 52)),
    ("perplexity {}", _shape("pplx" + "-", 48)),
    ("xai {}", _shape("xai" + "-", 80)),
    ("pinecone {}", _shape("pcsk" + "_", 60)),
    ("langsmith {}", _shape("lsv2" + "_pt_", 32, _HEX) + "_" + _made(10, _HEX)),
    ("wandb {}", _shape("wandb" + "_v1_", 70)),
    ("npm {}", _shape("npm" + "_", 36)),
    ("pypi {}", _shape("pypi" + "-AgEIcHlwaS5vcmc", 120, _URL)),
    ("docker {}", _shape("dckr" + "_pat_", 27, _URL)),
    ("digitalocean {}", _shape("dop" + "_v1_", 64, _HEX)),
    ("grafana {}", _shape("glsa" + "_", 32) + "_" + _made(8, _HEX)),
    ("linear {}", _shape("lin" + "_api_", 40)),
    ("notion {}", _shape("ntn" + "_", 46)),
    ("shopify {}", _shape("shpat" + "_", 32, _HEX)),
    ("atlassian {}", _shape("ATATT" + "3xFfGF0", 180, _URL) + "=" + _made(8, _HEX).upper()),
    ("terraform {}", _made(14) + ".atlasv1" + "." + _made(60)),
    ("tailscale {}", _shape("tskey" + "-auth-", 17) + "-" + _made(32)),
    ("age {}", _shape("AGE-SECRET-KEY" + "-1", 58, string.ascii_uppercase + string.digits)),
    ("jwt {}", ".".join(("ey" + "J" + _made(33, _URL), "ey" + "J" + _made(60, _URL), _made(43, _URL)))),
    (
        "neptune {}",
        base64.b64encode(
            json.dumps({"api_address": "https://app.neptune.ai", "api_" + "key": _made(36, _HEX)}).encode()
        ).decode(),
    ),
    ("GET https://host/x?sv=2024&sig={}&se=1", _made(40) + "%3D"),
    ("GET https://bucket.s3.amazonaws.com/k?X-Amz-Signature={}", _made(64, _HEX)),
):
    _add(_text, _secret)

# ---------------------------------------------------------------- names in text, Python, YAML, JSON
_add("db:\n  password: {}\n  port: 5432", _made(14))
_add("database:\n  host: db1\n  auth:\n    user: bob\n    password: {}", _made(12))
_add("client = Client(api_key='{}')", _made(32))
_add("opts = dict(token='{}')", _made(24))
_add("x = connect(host='db', password=\"{}\", port=1)", _made(10))
_add("Settings(db=Db(user='bob', password='{}'))", _made(11))
_add("Config(api_key=SecretStr('{}'))", _made(20))
_add("DB_PASS={}", _made(12))
_add("REDIS_PW={}", _made(12))
_add("SMTP_PASS: {}", _made(12))
_add("MYSQL_PWD={}", _made(9))
_add("export PGPASSWORD='{}'", _made(9) + " " + _made(4))
_add('declare -x AWS_SECRET_ACCESS_KEY="{}"', _made(40, _B64))
_add("aws_secret_access_key = {}", _made(40, _B64))
_add("aws_session_token = {}", _made(200, _B64) + "==")
_add("WANDB_API_KEY={}", _made(40, _HEX))
_add("wandb.login(key='{}')", _made(40, _HEX))
_add("$ wandb login --relogin {}", _made(40, _HEX))
_add("COMET_API_KEY={}", _made(25))
_add("setenv HF_TOKEN {}", _made(30))
_add("ENV OPENAI_API_KEY {}", _made(30))
_add("GITHUB_PAT={}", _made(30))
_add("LOCKSTEP_JOB_SECRET={}", _made(64, _HEX))
_add("API_TOKEN_PROD={}", _made(20))
_add("PASSWORD_FOR_DB={}", _made(20))
_add("SECRET_KEY_BASE={}", _made(64, _HEX))
_add("MONGO_CREDS={}", _made(16))
_add("SLACK_WEBHOOK_URL={}", "https://example.org/in/" + _made(30))
_add("CONNECTION_STRING=Server=db;Uid=bob;Pwd={};", _made(12))
_add("DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};EndpointSuffix=x", _made(86, _B64) + "==")
_add("Endpoint=sb://x/;SharedAccessKeyName=Root;SharedAccessKey={}", _made(43, _B64) + "=")
_add('{"username":"bob","key":"{}"}', _made(32, _HEX))
_add('{\n "username": "bob",\n "key": "{}"\n}', _made(32, _HEX))
_add(
    '{"auths": {"https://index.docker.io/v1/": {"auth": "{}"}}}',
    _base64("bob:" + _made(12)),
)
_add('{"type": "service_account", "private_key_id": "{}"}', _made(40, _HEX))
_add('{"client_id": "1", "client_secret": "{}", "refresh_token": "{}"}', _made(24), "1//0" + _made(60, _URL))
_add('{"note": "{\\"password\\": \\"{}\\"}"}', _made(14))
_add('"env": [{"name": "DB_PASSWORD", "value": "{}"}]', _made(14))
_add("env:\n- name: DB_PASSWORD\n  value: {}", _made(14))
_add("machine api.wandb.ai login user password {}", _made(40, _HEX))
_add("machine github.com\n  login bob\n  password {}\n", _made(20))
_add("default login anonymous password {}", _made(12))
_add("db.example.org:5432:train:bob:{}", _made(12))
_add("//registry.npmjs.org/:_authToken={}", _made(36))
_add("[pypi]\nusername = __token__\npassword = {}", _made(40))
_add("tokens:\n  - {}\n  - {}\n", _made(32), _made(32))
_add("tokens: ['{}', '{}']", _made(28), _made(28))
_add('"tokens": [\n  "{}",\n  "{}"\n ]', _made(28), _made(28))
_add("api_keys: [{}, {}]", _made(20), _made(20))
_add("passwords:\n- {}\n- {}", _made(10), _made(10))
_add("secrets:\n  db: {}\n  mail: {}\nport: 1", _made(10), _made(10))
_add("password: |\n  {}\nport: 1", _made(20))
_add("service:\n  token: >-\n    {}\n    {}\n  port: 1", _made(40), _made(40))
_add("secret: !vault |\n  {}\n  {}\nafter: 1", _made(60, string.digits) + "a", _made(60, string.digits) + "b")
_add("passphrase: correct horse {} staple", _made(8))
_add("clientSecret: '{}'", _made(30))
_add("users:\n- user:\n    client-key-data: {}", _base64(_made(90)))
_add("os.environ['HF_TOKEN'] = '{}'", _made(30))
_add("environ({'PATH': '/bin', 'MY_API_KEY': '{}', 'HOME': '/root'})", _made(30))
_add("setdefault('api_key', '{}')", _made(20))
_add("parser.add_argument('--password', default='{}')", _made(12))
_add("headers=[(b'host', b'x'), (b'x-api-key', b'{}')]", _made(20))
_add('password := "{}"', _made(12))
_add(":password => '{}'", _made(12))
_add("<server><password>{}</password></server>", _made(12))
_add("ALTER USER bob WITH PASSWORD '{}'", _made(12))
_add("CREATE USER bob IDENTIFIED BY '{}'", _made(12))
_add("root:{}:19000:0:99999:7:::", "$6$" + _made(8) + "$" + _made(86))
_add('RuntimeError: login failed for {"user": "bob", "passwd": "{}"}', _made(10))
_add('  File "a.py", line 3, in <module>\n    login(token="{}")\nValueError: no', _made(30))
_add("pydantic: input_value={'api_key': '{}', 'x': 1}, input_type=dict", _made(30))
_add("Namespace(lr=0.1, hf_token='{}', wandb_key=None)", _made(30))

# ---------------------------------------------------------------- addresses, headers, command lines
_add("postgresql://bob:{}@db:5432/train", _made(12))
_add("redis://:{}@cache:6379/0", _made(12))
_add("git clone https://{}@github.com/a/b.git", _made(40))
_add("amqp://bob:{}@mq//", _made(5) + "%40" + _made(5))
_add("https_proxy=http://bob:{}@proxy:3128", _made(10))
_add("SENTRY_DSN=https://{}@o1.ingest.sentry.io/1", _made(32, _HEX))
_add("jdbc:mysql://db/train?user=bob&password={}&ssl=1", _made(12))
_add("GET /x?access_token={}&a=1 HTTP/1.1", _made(30))
_add("Authorization: Bearer {}", _made(40))
_add("Authorization: Basic {}", _base64("bob:" + _made(12)))
_add("authorization: token {}", _made(40, _HEX))
_add('> Proxy-Authorization: Digest username="bob", response="{}"', _made(32, _HEX))
_add("{'Authorization': 'Bearer {}', 'Accept': '*/*'}".replace("{'A", "{ 'A"), _made(40))
_add("PRIVATE-TOKEN: {}", _made(20))
_add("X-Vault-Token: {}", _made(26))
_add("Cookie: session={}; theme=dark", _made(32))
_add("Set-Cookie: sid={}; Path=/; HttpOnly", _made(32))
_add("curl -H 'X-Api-Key: {}' https://host", _made(20))
_add("curl -u bob:{} https://host/x", _made(12))
_add("python train.py --password {} --lr 1", _made(12))
_add("python train.py --api-key={} --lr 1", _made(20))
_add("['python', 'train.py', '--hf_token', '{}', '--lr', '1']", _made(30))
_add("mysql -u bob -p{} train", _made(10))
_add("docker login -u bob -p {} registry.example.org", _made(12))
_add("sshpass -p {} ssh node1", _made(12))
_add("redis-cli -h cache -a {} ping", _made(12))
_add("openssl rsa -passin pass:{} -in key.pem", _made(12))
_add("vault login {}", _made(26))
_add('setx HUB_TOKEN "{}"', _made(20))
_add("session.auth = HTTPBasicAuth('bob', '{}')", _made(12))
_add("the password is {}", _made(12))
_add("wandb: using key {}", _made(40, _HEX))

# ---------------------------------------------------------------- blocks
_BODY = [_made(64, _B64) for _ in range(4)]
for _kind in ("RSA PRIVATE KEY", "OPENSSH PRIVATE KEY", "ENCRYPTED PRIVATE KEY"):
    _lines = [_made(64, _B64) for _ in range(3)]
    _add(f"-----BEGIN {_kind}-----\n" + "{}\n" * 3 + f"-----END {_kind}-----\nafter", *_lines)
_add(
    "-----BEGIN PGP PRIVATE KEY "
    + "BLOCK-----\nVersion: GnuPG v2\n\n{}\n{}\n=aB3d\n-----END PGP PRIVATE KEY "
    + "BLOCK-----",
    *_BODY[:2],
)
_add('"private_key": "-----BEGIN PRIVATE ' + "KEY-----\\n{}\\n{}\\n-----END PRIVATE " + 'KEY-----\\n"', *_BODY[2:])
_add("{}\n{}\n=aB3d\n-----END PGP PRIVATE KEY " + "BLOCK-----", _made(64, _B64), _made(64, _B64))
_add(
    "PuTTY-User-Key-File-3: ssh-ed25519\nPrivate-Lines: 2\n{}\n{}\nPrivate-MAC: 0",
    _made(64, _B64),
    _made(30, _B64),
)

_SHA, _UUID = _made(40, _HEX), "-".join(_made(n, _HEX) for n in (8, 4, 4, 4, 12))

HARMLESS: list[str] = [
    "the password is required; the passphrase was rejected",
    "using key 3 of 12, cached under key 1f0a",
    "attention.key.weight: torch.float32",
    "encoder.layer.0.attention.self.key.bias: torch.Size([768])",
    "model.layers.11.self_attn.k_proj.weight  torch.bfloat16  [4096, 4096]",
    "tokens: 4096",
    "num_tokens=1048576 tokens/s=52311.4",
    "max_tokens: 2048, max_new_tokens=256",
    "token_type_ids: tensor([[0, 0, 0, 1, 1]])",
    "pad_token='<pad>' eos_token='</s>' bos_token='<s>'",
    "special_tokens={'unk_token': '[UNK]', 'cls_token': '[CLS]', 'mask_token': '[MASK]'}",
    "tokenizer: gpt2",
    "tokenizer=GPT2TokenizerFast(name_or_path='gpt2', vocab_size=50257)",
    "tokens: ['The', 'Ġcat', 'Ġsat', '.']",
    "tokens: ['the', '##ing', 'transformers', 'internationalization']",
    "token: Ġthe",
    "secret_sharing_layer: Linear(in_features=16, out_features=16)",
    "secret_sharing_layer.weight: torch.float32 [16, 16]",
    "key_padding_mask: torch.bool [8, 128]",
    "key_value_heads=8, query_key_norm=True",
    "past_key_values: DynamicCache(layers=24)",
    'Missing key(s) in state_dict: "encoder.layers.0.weight", "encoder.layers.0.bias".',
    "missing key: model.layers.0.self_attn.q_proj.weight",
    "KeyError: 'hidden_states'",
    "KeyError: 'model.embed_tokens.weight'",
    "unexpected key(s): ['lm_head.weight']",
    "keys: dict_keys(['input_ids', 'attention_mask', 'labels'])",
    "sort_key: length, group_by_key=True",
    "primary_key: sample_id",
    "cache_key: " + _made(16, _HEX),
    "monkey: 3, keyboard: us, turkey=1",
    f"commit {_SHA}",
    f"git_sha={_SHA} branch=main",
    f"sha256:{_made(64, _HEX)}  model.safetensors",
    f"checkpoint hash: {_made(32, _HEX)}",
    f"run id {_UUID}",
    f"job_uuid: {_UUID}",
    "epoch 3 step 1200 | loss 2.3041 | lr 3.0e-04 | grad_norm 0.91",
    "{'loss': 2.31, 'grad_norm': 0.912, 'learning_rate': 0.0003, 'epoch': 0.12}",
    "eval: accuracy=0.8123 f1=0.7991 perplexity=11.21",
    "step 12 | loss 0.31 | tokens/s 12345 | num_tokens=4096",
    "train: 34%|███▍      | 340/1000 [01:02<02:00,  5.49it/s, loss=1.2]",
    "[rank0]: Traceback (most recent call last):",
    'File "/home/bob/train.py", line 12, in main',
    "    outputs = model(input_ids, attention_mask=mask, token_type_ids=types)",
    "    token = tokenizer.decode(ids[0])",
    "    api_key = os.environ.get('OPENAI_API_KEY')",
    "    client = Client(api_key=api_key, timeout=30)",
    "    password = getpass.getpass()",
    "    def login(user: str, password: str, token: Optional[str] = None) -> None:",
    "    if token == tokenizer.eos_token:",
    "    loss = F.cross_entropy(logits, labels, ignore_index=pad_token_id)",
    "ValueError: token indices sequence length is longer than 512",
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1970, unhandled system error",
    "node1:100:100 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
    "node1:100:221 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>",
    "ncclUniqueId commId 0x" + _made(16, _HEX) + " rank 0 nranks 8",
    "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    "MASTER_ADDR=node1 MASTER_PORT=29500 WORLD_SIZE=8 RANK=3",
    "LOCKSTEP_DEBUG_MODE=1 OMP_NUM_THREADS=8",
    "TOKENIZERS_PARALLELISM=false",
    "PWD=/home/bob/project OLDPWD=/home/bob",
    "SSH_AUTH_SOCK=/run/user/1000/keyring/ssh",
    "XDG_SESSION_ID=3 XDG_SESSION_TYPE=tty",
    "the token was refused; see https://host/docs#keys",
    "token = None, password: null, secret=false, key=3",
    "using password: YES",
    "forward pass: 12.3 ms, backward pass: 25.1 ms",
    "two_pass: true, first_pass=done",
    "sk-learn 1.5.0 found",
    "sk-learn-compatible estimator wrapper enabled",
    "author: Bob, authority=none, authentication disabled",
    "auth: none",
    "DDP bucket 3: 25.00 MiB, keys 14",
    "shape=(8, 128, 768) dtype=torch.bfloat16 device=cuda:0",
    "Linear(in_features=768, out_features=50257, bias=False)",
    "optimizer: AdamW(lr=0.0003, betas=(0.9, 0.999), eps=1e-08)",
    "dataset: wikitext-103-raw-v1, split=train, fingerprint=" + _made(16, _HEX),
    "Loading checkpoint shards: 100%|##########| 2/2",
    "saved to /ckpt/step_00001200/model-00001-of-00002.safetensors",
    "https://huggingface.co/gpt2/resolve/main/config.json",
    "Downloading https://host/a?rev=main&download=true",
    "pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu",
    "wandb: Run data is saved locally in wandb/run-20250314_120000-" + _made(8, string.ascii_lowercase + "0123"),
    "wandb: Syncing run faithful-sun-12",
    "wandb login required; run `wandb login`",
    "mkdir -p /data/out && cp -p a b",
    "srun -p gpu --nodes=2 lockstep launch train.py",
    "docker run -p 8080:80 image:latest",
    "ssh -p 2222 node1 hostname",
    "attn_implementation: sdpa, use_cache: false, torch_dtype: bfloat16",
    "vocab: {'<unk>': 0, '<s>': 1, '</s>': 2}",
    "added_tokens_decoder: {0: AddedToken('<unk>', rstrip=False)}",
    "chat_template: {% for message in messages %}{{ message.content }}{% endfor %}",
    "image_token_id: 151655, vision_start_token_id: 151652",
    "num_key_value_heads: 8",
    "public_key: ssh-ed25519 comment",
    "2025-03-14 12:00:00,123 INFO root: starting 8 processes on 2 nodes",
    "train.py:12:5: warning: unused variable",
    "rank 3 (pid 4711) waits in backward at train.py:88 for 31 s",
    "the secret of good data: shuffle",
]
