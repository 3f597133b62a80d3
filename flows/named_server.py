"""Whether the Prefect server that PREFECT_API_URL names can be used, asked the way that Prefect will ask it.

Prefect's own client is used, so its settings hold: PREFECT_API_AUTH_STRING, PREFECT_API_SSL_CERT_FILE and the rest,
whether they come from the environment or from a profile. What does not work is said before anything is loaded.
"""

from __future__ import annotations

import ssl

from flows.home import ServerError

TIMEOUT_S = 10.0


def require_server(url: str) -> None:
    """Raises ``ServerError``, with what to do, when nothing answers at ``url``, when its certificate is not trusted,
    or when it does not let this process in."""
    import httpx
    from prefect.client.orchestration import get_client

    try:
        with get_client(httpx_settings={"timeout": TIMEOUT_S}, sync_client=True) as client:
            client.api_version()
    except httpx.HTTPStatusError as error:
        raise ServerError(_refused(url, error.response.status_code)) from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise ServerError(_silent(url, error)) from error


def _refused(url: str, status: int) -> str:
    if status in (401, 403):
        return (
            f"the Prefect server at {url} does not let this process in (status {status}): set "
            "PREFECT_API_AUTH_STRING to the user:password that the server was started with "
            "(PREFECT_SERVER_API_AUTH_STRING)"
        )
    return f"PREFECT_API_URL is {url}, but what answers there is no Prefect server or a broken one (status {status})"


def _silent(url: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"PREFECT_API_SSL_CERT_FILE, or another file of Prefect's TLS settings, is not there ({error})"
    if _distrusts(error):
        return (
            f"the certificate of the Prefect server at {url} is not trusted ({error}): PREFECT_API_SSL_CERT_FILE names "
            "the file with the certificate of its authority"
        )
    return (
        f"PREFECT_API_URL is {url}, but no Prefect server answers at {url} ({type(error).__name__}: {error}): "
        "start that server, mend the address, or unset PREFECT_API_URL and Forge starts one for the run"
    )


def _distrusts(error: BaseException | None) -> bool:
    """Whether a failed check of a certificate lies behind ``error``."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
