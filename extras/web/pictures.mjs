// The first screen as a picture and as an animation, page.png and page.gif, and both for a dark page. Serve out/web first.
//
//     CHROMIUM=/usr/bin/chromium node extras/web/pictures.mjs http://localhost:8000 out/pictures
//
// The animation needs ffmpeg. It shows the page's slow motion, FASTER times as fast.
import { execFileSync } from "node:child_process";
import { mkdir } from "node:fs/promises";
import { chromium } from "playwright-core";

const FASTER = 2;
const PER_SECOND = 8; // frames
const AFTER = 3; // seconds that the last frame stays

const [site, folder] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--headless", "--no-sandbox"] });
for (const [name, colorScheme] of [["page", "light"], ["page-dark", "dark"]]) {
  const frames = `${folder}/${name}`;
  await mkdir(frames, { recursive: true });
  const page = await browser.newPage({ viewport: { width: 1200, height: 680 }, colorScheme });
  await page.clock.install();
  await page.goto(site);
  await page.waitForFunction(() => document.body.dataset.state === "ready"); // nothing moves any more
  await page.clock.pauseAt(Date.now() + 60_000); // from here on, time passes only where we say so
  await page.click("#replay");
  await page.locator("#replay").evaluate((button) => (button.hidden = true)); // nobody can click a picture

  for (let i = 0, isOver = false; !isOver; i++) {
    isOver = !(await page.locator(".idea .off .waiting").count());
    await page.locator(".idea .pair").screenshot({ path: `${frames}/${i}.png` });
    await page.clock.runFor((1000 * FASTER) / PER_SECOND);
  }
  await page.screenshot({ path: `${folder}/${name}.png`, clip: { x: 0, y: 0, width: 1200, height: 630 } }); // as link previews want it

  const inputs = ["-y", "-loglevel", "error", "-framerate", PER_SECOND, "-i", `${frames}/%d.png`];
  const colours = "split[a][b];[a]palettegen=max_colors=32[p];[b][p]paletteuse=dither=none:diff_mode=rectangle";
  const last = `tpad=stop_mode=clone:stop_duration=${AFTER}`;
  execFileSync("ffmpeg", [...inputs, "-filter_complex", `${last},${colours}`, `${folder}/${name}.gif`], { stdio: "inherit" });
}
await browser.close();
