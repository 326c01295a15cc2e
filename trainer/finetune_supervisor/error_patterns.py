"""Patterns that classify error messages by failure reason.

The operator derives the verdict from them, and the supervisor keeps the decisive part of a long message; their syntax
is that of RE2. The exception class is often RuntimeError, regardless of the cause. `make bench-failures` measures the
accuracy on a labelled corpus of real error messages, a third of which was held out while the patterns were written.
"""

from __future__ import annotations

from finetune_supervisor.peer_loss import PEER_LOSS_PATTERNS

_SSL = r"\[SSL(: |\] )"
_UNPICKLING = r"UnpicklingError: "
EXCEPTIONS = {_SSL: r"\[SSL.*certificate.verify", _UNPICKLING: r"UnpicklingError: .*weights only"}
_HUB = r"(huggingface\.co|hf\.co|modelscope\.cn|hf-mirror|amazonaws)"

# Reasons, most specific first, with expressions of which one must match.
PATTERNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "UserCodeError",
        (
            r"NCCL.*invalid usage",
            r"duplicate GPU detected",
            r"\b404 client error|client error '404",
            r"ifa != nullptr",  # gloo: unknown network interface
            r"offline mode is enabled|outgoing traffic has been disabled",
        ),
    ),
    (
        "SharedMemoryExhausted",
        (
            r"bus error",
            r"shared memory \(shm\)",
            r"out of shared memory",
            r"unable to \w+( to)? [^<]{0,40}</?torch_",
            r"creating shared memory segment",
            r"(no space left on device|errno 28).*(/dev/shm|torch_\d+|psm_)",
            r"(/dev/shm|shm_open|posix_fallocate).*(no space left|failed|error)",
        ),
    ),
    (
        "HostOutOfMemory",
        (
            r"cannot allocate memory",
            r"std::bad_alloc",
            r"\bMemoryError\b",
            r"_ArrayMemoryError|ArrowMemoryError|malloc of size \d+ failed",
            r"DefaultCPUAllocator: .*(can't|not enough|cannot) ?(allocate)?",
            r"worker .*killed by signal: killed",
            r"out of memory: kill(ed)? process",
            r"unable to allocate [\d.]+ .i?B for an array",
            r"\berrno 12\b",
            r"memory cgroup out of memory",
            r"oom-kill",
            r"exitcode: -9\b|(died with|terminated with|killed by) (signal )?:? ?<?(Signals\.)?SIGKILL",
        ),
    ),
    (
        "CudaOutOfMemory",
        (
            r"CUDA out of memory",
            r"HIP out of memory",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"CUSOLVER_STATUS_ALLOC_FAILED",
            r"(cuda|nccl|device|gpu|cu\w*)[^\n]{0,160}out of memory",
            r"cudaErrorMemoryAllocation",
            r"error out of memory at line",
        ),
    ),
    (
        "GpuHardware",
        (
            r"Xid \(.*?\): (46|48|6[0-4]|7[49]|8[01]|9[45]|109|110|119|120|13[67]|14\d|15[0-9])\b",
            r"\bXid:? ?(48|6[34]|7[49]|9[45]|119|120)\b",
            r"ECC[ _]?(error|uncorrectable)|double.bit ECC",
            r"uncorrectable.{0,12}(ECC|NVLink)",
            r"ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE",
            r"fallen off the bus",
            r"GPU is lost",
            r"row remap",
            r"hardware stack error|CUDA_ERROR_HARDWARE",
            r"GSP (RPC )?timeout",
            r"NVLink: fatal error|GPU requires reset",
        ),
    ),
    (
        "DriverMismatch",
        (
            r"driver/library version mismatch",
            r"forward compatibility was attempted",
            r"driver version is insufficient",
            r"unsupported display driver",
            r"NVIDIA driver on your system is too old",
            r"system not (yet )?(initialized|ready)|SystemNotReady",
            r"no kernel image is available",
            r"is not compatible with the current PyTorch installation",
            r"PTX was compiled with an unsupported toolchain",
            r"cudaErrorInsufficientDriver|COMPAT_NOT_SUPPORTED",
            r"not supported in the installed CUDA driver",
            r"fabric ?manager",
        ),
    ),
    (
        "GpuUnavailable",
        (
            r"no CUDA-capable device|CUDA_ERROR_NO_DEVICE",
            r"CUDA unknown error",
            r"CUDA-capable device\(s\) is/are busy",
            r"devices? (are|is) busy or unavailable",
            r"invalid device ordinal",
            r"no CUDA GPUs are available",
            r"unable to determine the device handle",
            r"NVIDIA-SMI has failed",
            r"failed to initialize NVML",
            r"no NVIDIA driver",
            r"cuInit.*(unknown error|failed)",
        ),
    ),
    (
        "DeviceAssert",
        (r"device-side assert", r"\.cu:\d+: .*block: \[.*assertion .* failed"),
    ),
    (
        "CudaFault",
        (
            r"illegal[ _]?(memory access|instruction|address)",
            r"cuda(Error)?_?(error_)?launch_?fail",
            r"misaligned address",
            r"unspecified launch failure",
            r"invalid program counter",
            r"CU(BLAS|DNN|SOLVER|SPARSE|FFT)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)",
            r"cudnn internal error",
            r"Xid \(.*?\): (8|13|31|32|43|45|68|69)\b",
            r"CUDA error: unknown error",
        ),
    ),
    (
        "RankCrashed",
        (
            r"segmentation fault",
            r"\bSIG(SEGV|ILL|FPE)\b",
            r"exitcode: -(4|8|11)\b",
            r"double free or corruption|(free|malloc|realloc|munmap_chunk)\(\): (invalid|corrupted|unaligned)",
            r"corrupted (size vs|double-linked)|stack smashing detected",
            r"worker .*killed by signal: (aborted|floating point exception|illegal instruction)",
        ),
    ),
    (
        "HubUnauthorized",
        (
            r"gated (repo|dataset)|403 forbidden:",
            r"is restricted and you are not",
            r"\b(401|403) client error|client error '(401|403)|HTTP Error (401|403)",
            r"\((401|403|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken)\) when calling",
            r"invalid (user|access|authentication) token|invalid (username or password|credentials)",
            r"(unauthorized|forbidden)'? for url|make sure you are authenticated|LocalTokenNotFound",
            r"awaiting a review from the repo authors",
            r"token .*(expired|is invalid|required)",
        ),
    ),
    (
        "HubUnavailable",
        (
            r"\b(429|5\d\d) (client|server) error|(client|server) error '(429|5\d\d)",
            r"HTTP Error (429|5\d\d)|\b(HTTP|status)( code)?:? (429|50[0234])\b",
            r"\((429|5\d\d|SlowDown|ServiceUnavailable|InternalError|RequestTime\w*|Thrott\w*)\) when calling",
            r"\((429 too many requests|50[0234] [a-z ]+)\)",
            r"too many (requests|\d+ error responses)",
            r"(HTTPS?ConnectionPool|max retries|timed out|timeout|unreachable|reset|resolve|resolution).*" + _HUB,
            _HUB + r".*(max retries|timed? ?out|unreachable|reset|resolve([^\w/]|$)|resolution|incomplete)",
            r"HTTPS?ConnectionPool.*max retries exceeded",
            r"read timeout on endpoint|read (operation )?timed out|ConnectTimeoutError",
            r"EOF occurred in violation of protocol|SSL(EOF)?Error",
            _SSL,
            r"IncompleteRead|ChunkedEncodingError|consistency check failed: file should be of size",
            r"(internal server error|service (temporarily )?unavailable|bad gateway|gateway time-?out) for url",
            r"before we received a valid response from endpoint",
            r"cannot find the appropriate snapshot folder",
            r"couldn't connect to (.*huggingface|'https?://)|couldn't reach .* on the hub\b",
            r"error happened while trying to locate the files? on the hub",
            r"<urlopen error (\[Errno (-\d|1\d\d)|timed out|_ssl)|could not connect to the endpoint url",
            r"remote end closed connection|RemoteDisconnected|server disconnected|'Connection aborted\.'",
            r"ContentTooShort|retrieval incomplete",
            r"(^|\.)((Connect|RemoteProtocol|Read)Error|(Connect|Read|Write|Pool)Timeout): ",
            r"(^|\.)Client(Connector|Payload)\w*Error: ",
            r"(httpx|requests|urllib3|aiohttp|botocore)\.\S*(timeout|ConnectError|ConnectionError|ProtocolError)",
        ),
    ),
    (
        "StorageFault",
        (
            r"input/output error|remote I/O error|stale (NFS )?file handle",
            r"transport endpoint (is not connected|shutdown)|structure needs cleaning",
            r"\b(errno|os error) (5|107|108|116|117|121)\b",
            r"read-only file system: '?/output\b",  # mounted for writing; after an I/O error, ext4 becomes read-only
        ),
    ),
    (
        "CheckpointCorrupt",
        (
            r"PytorchStreamReader failed",
            r"SafetensorError: error while deserializing",
            r"HeaderTooLarge|MetadataIncompleteBuffer|InvalidHeader",
            r"unexpected EOF, expected \d+ more bytes",
            r"pickle data was truncated",
            _UNPICKLING,
            r"filename 'storages' not found",
            r"checkpoint being loaded used a DP world size",
            r"failed finding central directory",
            r"EOFError: ran out of input",
            r"invalid magic number; corrupt file|BadZipFile|file is not a zip file|unpickling stack underflow",
            r"incomplete metadata, file not fully covered",
        ),
    ),
    (
        "DiskFull",
        (
            r"no space left on device",
            r"\berrno 28\b|os error 28\b",
            r"disk quota exceeded|database or disk is full|\d+ requested and \d+ written",
            r"PytorchStreamWriter failed",
            r"inline_container\.cc:\d+\] \. unexpected pos",
        ),
    ),
    (
        "ImageBroken",
        (
            r"undefined symbol",
            r"(GLIBC(XX)?|CXXABI)_[\d.]+'? not found",
            r"error (compiling objects for|building) extension",
            r"lib\S+\.so\S*: cannot open shared object file",
            r"CUDA_HOME (does not exist|environment variable is not set)",
            r"invalid ELF header|wrong ELF class|binary incompatibility|compiled using NumPy",
            r"ninja (not being installed|is required)|no working C(\+\+)? compiler|failed to find C compiler",
            r"No module named '[\w.]+\._\w+'|cannot import name '_\w+' from partially initialized",
            r"is required for a normal functioning of this module|importing the numpy C-extensions failed",
            r"lib\w+\.so\S* not found",
            r"nvcc.*(not found|no such file)",
            r"DLL load failed",
        ),
    ),
    (
        "NonFiniteLoss",
        (
            r"loss became infinite or nan",
            r"loss scale already at minimum",
            r"(loss|metric)\b.{0,40}\b(nan|inf)\b.{0,20}(not finite|stop)",
            r"(nan|inf) (or \w+ )?(in|encountered in|detected in) (the )?(loss|grad)",
            r"contains either `?inf`?, `?nan`?|returned nan values|is non-finite, so it cannot be clipped",
            r"found (nan|inf)|(nan|inf) found|loss is (nan|inf)|(nan|non-?finite) loss",
        ),
    ),
    (
        "PortInUse",
        (
            r"address already in use|failed to bind to address",
            r"EADDRINUSE|port \d+ is (already )?in use",
            r"server socket has failed to (listen|bind)",
        ),
    ),
    (
        "RendezvousTimeout",
        (
            r"name or service not known",
            r"temporary failure in name resolution",
            r"gai error|getaddrinfo|nodename nor servname",
            r"hostname of the client socket cannot be retrieved",
            r"unable to find address for|cannot resolve \S+ to|could not get the list of servers",
            r"errors resolving|address lookup failed|domain name not found",
            r"RendezvousTimeoutError|RendezvousConnectionError|RendezvousClosedError",
            r"waiting for clients|RuntimeError: wait timeout",
            r"TCP client failed to connect",
            r"client socket has timed out .*while trying to connect|connect\(\) timed out",
        ),
    ),
    (
        "NetworkFault",
        (
            r"no route to|ncclSocketInit|software caused connection abort",
            r"network is unreachable",
            r"no (socket )?interface found|transport retry counter exceeded|local catastrophic error",
            r"ibv_\w+ (failed|error)|ibv_\w+.*failed with error",
            r"failed to modify QP",
            r"got completion (with|from)",
            r"address family not supported",
            r"ncclSystemError|unhandled system error",
            r"\b(RoCE|GID|IB port|mlx5)\b.{0,60}(fail|error|down|invalid)",
        ),
    ),
    ("RankKilled", (r"worker .*killed by signal: ",)),
    (
        "PeerLost",
        # The supervisor does not use the last expression, because the watchdog may also report a GPU error, which
        # only the patterns above recognise.
        (*PEER_LOSS_PATTERNS, r"watchdog thread terminated with exception"),
    ),
)
