// What the status line says until the modules run, or if they never do. So this file is no module.

(() => {
  const status = document.querySelector("#loading, #status");
  const { dataset } = document.body;
  if (location.protocol === "file:") {
    status.textContent = "Serve this folder: run python -m http.server in it, and open http://localhost:8000.";
    return;
  }
  const complain = ({ target, message }) => {
    if (dataset.state !== "loading") return;
    if (target.type === "module") status.textContent = "The page did not arrive as a whole. Check the connection and reload.";
    else if (message) status.textContent = `This browser is too old for the page: ${message}.`;
  };
  addEventListener("error", complain, true);

  // a screen reader need not read out how many bytes have arrived
  status.ariaLive = "off";
  const listen = () => (status.ariaLive = "polite");
  new MutationObserver(listen).observe(document.body, { attributeFilter: ["data-state"] });
})();
