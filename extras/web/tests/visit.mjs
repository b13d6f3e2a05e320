// Uses the exported page in headless Chromium, as a reader would, and prints what it saw as JSON.
//
//     node extras/web/tests/visit.mjs PLAN        PLAN, as JSON: see test_web.py
//
import { createRequire } from "node:module";

const { chromium } = createRequire(new URL("../package.json", import.meta.url))("playwright-core");
const plan = JSON.parse(process.argv[2]);
const args = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"];
const browser = await chromium.launch({ executablePath: plan.chromium, args });
const seen = { requests: [], complaints: [] };

/** Open the page, wait until it has loaded, and `work`. meanwhile: what to do while the model is loading. */
async function visit(url, work, meanwhile, reducedMotion = "reduce") {
  const page = await browser.newPage({ viewport: { width: 1280, height: 720 }, reducedMotion });
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("pageerror", (error) => seen.complaints.push(`uncaught: ${error}`));
  page.on("console", (line) => ["error", "warning"].includes(line.type()) && seen.complaints.push(line.text()));
  let arrive;
  const arrived = new Promise((resolve) => (arrive = resolve));
  if (meanwhile) {
    await page.route("**/model.onnx.gz?*", async (route) => {
      await arrived;
      await route.continue();
    });
  }
  await page.goto(url);
  await meanwhile?.(page);
  arrive();
  await idle(page);
  await work(page);
  await page.close();
}

/** Wait until the page is waiting for the reader. */
async function idle(page) {
  await page.waitForFunction(() => !["loading", "preparing", "running"].includes(document.body.dataset.state));
  await drawn(page);
}

/** Wait until the newest state has been drawn. */
async function drawn(page) {
  await page.evaluate(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))));
}

async function fill(page, values) {
  await page.evaluate(() => (document.getElementById("settings").open = true));
  for (const [name, value] of Object.entries(values)) await page.locator(`[name=${name}]`).fill(value);
  await page.keyboard.press("Escape"); // closes the settings
}

/** Return what the reader sees, once the page is idle. */
async function result(page) {
  await idle(page);
  return page.evaluate(() => {
    const text = (id) => document.getElementById(id).textContent.trim().replace(/\s+/g, " ");
    const typed = (name) => document.querySelector(`.race .${name} .typed`).textContent;
    return {
      text: document.getElementById("text").textContent,
      texts: ["off", "on"].map(typed),
      computed: ["off", "on"].map((name) => Number(text(`computed-${name}`).replaceAll(",", ""))),
      status: text("status"),
      message: text("message") + text("refused"),
      below: document.getElementById("refused").parentElement.querySelector("textarea, input")?.name,
      about: text("about"),
      name: text("next-name"),
      caption: document.querySelector("#stage .caption").textContent,
      next: [...document.querySelectorAll("#next li")].map((item) => item.textContent),
      state: document.body.dataset.state,
      heading: document.querySelector("section:not([hidden]) h1").textContent,
      focus: document.activeElement.name || document.activeElement.id || document.activeElement.tagName,
      address: location.search,
    };
  });
}

async function run(page, values) {
  await fill(page, values);
  await page.click("#run");
  return result(page);
}

/** Go to a step of the lesson. */
async function step(page, number) {
  await page.click(`nav a >> nth=${number - 1}`);
  await page.locator(`#step-${number}:not([hidden])`).waitFor();
  await idle(page);
}

/** Return the text of an element, once it has some that includes `part`. */
async function said(page, selector, part = "") {
  await page.waitForFunction(
    ([selector, part]) => {
      const text = document.querySelector(selector)?.textContent;
      return text && text.includes(part);
    },
    [selector, part],
  );
  await drawn(page);
  return page.locator(selector).first().textContent();
}

/** Wait until all mistakes have an answer. */
async function mistakes(page) {
  await page.waitForFunction(() => [...document.querySelectorAll("#mistakes small")].every((each) => each.textContent));
  await drawn(page);
}

const numbers = (page) => page.locator(".idea .number").allTextContents();

// the first picture moves before the model has arrived, and its arrival does not begin it again
seen.motion = [];
await visit(
  plan.site,
  async (page) => seen.motion.push(await numbers(page)),
  async (page) => {
    await page.evaluate(() => {
      window.counts = [];
      const watch = () => {
        window.counts.push(Number(document.querySelector(".idea .off .number").textContent));
        requestAnimationFrame(watch);
      };
      watch();
    });
    await page.waitForFunction((all) => window.counts.at(-1) === all, plan.all);
    seen.motion.push(await numbers(page), await page.evaluate(() => window.counts));
  },
  "no-preference",
);

// the reader guesses, also before the model has arrived, and races
await visit(
  `${plan.site}#step-2`,
  async (page) => {
    seen.waits = (await result(page)).computed;
    await page.click("#run");
    await page.locator("#guess input[name=faster]").first().focus();
    const { focus } = await result(page);
    seen.guessed = [focus, await page.locator("#result").innerText()];
  },
  async (page) => {
    await page.locator("#guess label", { hasText: /^16×/ }).click();
    await page.locator("#guess label", { hasText: /^8×/ }).click();
  },
);

// the lesson, from its beginning to its end
await visit(plan.site, async (page) => {
  seen.idea = [await numbers(page), await page.locator(".idea .typed").allTextContents()];
  seen.marks = await page.locator(".idea text:not(.letter)").allTextContents();

  // the race, whose result stays
  await page.click("text=Race them on this computer");
  await drawn(page);
  seen.began = await page.evaluate(() => document.activeElement.tagName);
  await page.click("#run");
  seen.race = await result(page);
  const bars = () => page.locator(".costs i").evaluateAll((each) => each.map((it) => it.getBoundingClientRect().width));
  seen.bars = [await page.locator("#result, #reason").allInnerTexts(), await bars(), await page.locator(".costs p").first().evaluate((it) => it.getBoundingClientRect().width)];
  await page.click("#next-step");
  seen.code = await page.locator(".code pre").evaluateAll((all) =>
    all.flatMap(({ textContent, firstChild }) => {
      const blue = [...firstChild.querySelectorAll(".on")].map((each) => each.textContent);
      return textContent.trimEnd().split("\n").map((line) => [line, blue.includes(line)]);
    }),
  );
  await page.goBack();
  seen.returned = [await result(page), await page.locator("#result").isVisible()];
  seen.drawn = await page.locator(".race path:is(.off, .on)").evaluateAll((all) => all.map((it) => it.getTotalLength()));
  seen.again = await run(page, plan.job);
  seen.mistyped = await run(page, { prompt: "a#b€#" });
  await run(page, { ...plan.default, max_new_tokens: "24" });

  // keys and values: what is under the pointer, and a column that is hidden
  await step(page, 5);
  await page.click("#take");
  await said(page, "#verdict-5");
  seen.columns = [await page.locator("#three svg").count(), await page.locator("#three").innerText()];
  await run(page, {});
  await page.click("#all");
  await page.click("#layer label >> nth=0");
  await page.click("#head label >> nth=0");
  seen.marked = [];
  for (const place of ["#cells button", "#text span"]) {
    await page.locator(place).nth(plan.marked).hover();
    seen.marked.push(await result(page));
  }
  await page.mouse.move(1, 1);
  seen.unmarked = await result(page);
  await page.locator("#cells button").nth(2).click();
  seen.taken = await said(page, "#verdict-5", "character 3,");
  await page.click("#all");

  // step by step, paused and continued
  await fill(page, plan.default);
  seen.prepared = await result(page);
  await page.click("#one");
  seen.one = await result(page);
  await page.click("#run");
  await page.waitForFunction((count) => document.getElementById("text").children.length > count, seen.one.text.length + 2);
  await page.evaluate(() => document.getElementById("run").click()); // at once: page.click waits, and the run might end
  seen.paused = await result(page);
  await page.click("#back");
  seen.back = await result(page);

  // why they may be kept
  await step(page, 4);
  const change = async () => [await said(page, "#verdict-4", "“"), ...(await page.locator("#stay, #change").allTextContents())];
  seen.change = [await change()];
  await page.locator("#change-at").fill("5");
  await page.waitForFunction(() => document.getElementById("stay").textContent === "4");
  seen.change.push(await change());
  const rows = page.locator(".why svg path.changed");
  seen.rows = await rows.evaluate((each) => each.getTotalLength());
  await page.waitForFunction(() => location.search.includes("change")); // the address changes a little later
  await page.click("#layer label >> nth=0");
  seen.first = [await said(page, "#verdict-4", "layer 1"), await rows.evaluate((each) => each.getTotalLength())];

  // break it
  await step(page, 6);
  await mistakes(page);
  seen.mistakes = [];
  for (const radio of await page.locator("#mistakes input").all()) {
    await radio.check({ force: true });
    await drawn(page);
    seen.mistakes.push([await page.locator("#verdict-6").textContent(), await page.locator("#bug").textContent()]);
  }
  seen.right = await page.locator("#text span").evaluateAll((each) => each.map(({ dataset }) => dataset.correct));

  // the cost
  await page.click("#next-step");
  seen.scale = [await said(page, "#scale-token"), await said(page, "#scale-text")];
  await page.locator("#scale-heads").fill("32");
  seen.scale.push(await said(page, "#scale-token"));
  await page.locator("#scale-model").selectOption("Llama 3 70B");
  seen.scale.push(await said(page, "#scale-sharing"));
  await page.locator("#scale-tokens").fill("14");
  seen.scale.push(await said(page, "#scale-length"));
  await page.locator("#scale-heads").fill("");
  seen.scale.push(await page.locator("p:has(#scale-heads)").textContent(), await page.locator("#scale-result").isVisible());
  await page.goBack();
  await page.waitForFunction(() => document.querySelector("#verdict-6").textContent);
  seen.back6 = await result(page);
});

// a link to a moment, and a mistake in the form that is mended
await visit(plan.site + plan.moment, async (page) => {
  const verdict = await said(page, "#verdict-4", "“");
  await page.waitForFunction(() => !location.search.includes("layer")); // it changes a little later
  seen.moment = [verdict, (await result(page)).address];
  await step(page, 5);
  await fill(page, { temperature: "abc" });
  await drawn(page);
  seen.refused = await result(page);
  await fill(page, { temperature: "0.8" });
  seen.mended = await result(page);
});

// with the keyboard only
await visit(`${plan.site}?layer=1#step-5`, async (page) => {
  const press = async (key, times = 1) => {
    for (let i = 0; i < times; i++) await page.keyboard.press(key);
  };
  const focus = async (selector) => {
    for (let i = 0; i < 40; i++) {
      if (await page.evaluate((selector) => document.activeElement.matches(selector), selector)) return;
      await press("Tab");
    }
  };
  const label = () => page.evaluate(() => document.activeElement.ariaLabel);
  await focus("#settings summary");
  await press("Enter");
  await focus("[name=prompt]");
  await press("Control+A");
  await page.keyboard.type("Abe, ");
  await press("Enter");
  seen.keyboard = { run: await result(page), three: [] };

  // three characters in large: the arrow keys move through all of them
  await focus("#three button");
  for (const key of ["End", "ArrowLeft", "ArrowLeft", "Home"]) {
    await press(key);
    await drawn(page);
    await drawn(page);
    seen.keyboard.three.push([await label(), (await result(page)).about]);
  }
  await press("Enter");
  seen.keyboard.hidden = [await said(page, "#verdict-5"), await label()];
  await press("Enter");

  // all of them in the strip
  await focus("#all");
  await press("Enter");
  await focus("#cells button");
  await press("Home");
  await press("ArrowRight", 2);
  seen.keyboard.marked = await result(page);
  await press("End");
  seen.keyboard.end = await result(page);
  await press("ArrowLeft", 3);
  await press("Enter");
  seen.keyboard.taken = await said(page, "#verdict-5");
  await page.locator("#next-step").focus();
  await press("Enter");
  await drawn(page);
  seen.keyboard.next = await result(page);

  // readers with different needs: does the page fit, and can they see what is on it?
  seen.readers = {};
  for (const [name, { viewport, textSize = 100, ...media }] of Object.entries(plan.readers)) {
    await page.setViewportSize(viewport);
    await page.emulateMedia({ colorScheme: "light", forcedColors: "none", reducedMotion: "reduce", ...media });
    await page.evaluate((size) => (document.documentElement.style.fontSize = size), textSize === 100 ? "" : `${textSize}%`);
    const [widths, bottoms] = [[], []];
    for (const number of [2, 3, 4, 5, 6, 7, 1]) {
      await step(page, number);
      if (number === 6) await mistakes(page);
      await drawn(page);
      const { scrollWidth, scrollHeight } = await page.evaluate(() => {
        const { scrollWidth, scrollHeight } = document.documentElement;
        return { scrollWidth, scrollHeight };
      });
      widths.push(scrollWidth);
      if (number < 7) bottoms.push(scrollHeight); // the last is long
    }
    seen.readers[name] = await page.evaluate(() => {
      const stroke = (name) => getComputedStyle(document.querySelector(name)).stroke;
      const both = ({ color, backgroundColor }) => [color, backgroundColor];
      const seen = (each) => each.bottom <= innerHeight && each.top >= 0 && each.left >= 0 && each.right <= innerWidth;
      return {
        colours: [both(getComputedStyle(document.querySelector(".go"))), both(getComputedStyle(document.body))],
        squares: [stroke(".idea path.off"), stroke(".idea path.on"), stroke(".idea .on path.kept"), getComputedStyle(document.body).backgroundColor],
        go: seen(document.getElementById("next-step").getBoundingClientRect()),
        first: document.querySelector(".idea svg").getBoundingClientRect().y,
      };
    });
    Object.assign(seen.readers[name], { width: Math.max(...widths), bottom: Math.max(...bottoms) });
  }
});

await browser.close();
console.log(JSON.stringify(seen));
